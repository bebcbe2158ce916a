"""Function words by language: articles, pronouns, prepositions, conjunctions, auxiliaries; letters after apostrophes.

Written for this library. Accents are those of the language; `words.Words` strips them where it strips the texts'.
"""

from __future__ import annotations

_ENGLISH = """
a about above after again against ain all am among an and any are aren as at
be because been before being below between both but by
can cannot could couldn
d did didn do does doesn doing don done down during
each either else ever every
few for from further
had hadn has hasn have haven having he hence her here hers herself him himself his how however
i if in into is isn it its itself
just
ll
m ma may me mightn might more most much must mustn my myself
needn neither no nor not now
o of off on once one only onto or other others ought our ours ourselves out over own
per
quite
rather re
s same shall shan she should shouldn since so some such
t than that the their theirs them themselves then there therefore these they this those though through thus to too
under until unto up upon us
ve very via
was wasn we were weren what whatever when whenever where whether which whichever while who whoever whom whose why will
with within without won would wouldn
y yet you your yours yourself yourselves
"""

_GERMAN = """
ab aber alle allein allem allen aller alles als also am an andere anderem anderen anderer anderes ans auch auf aus
bei beide beiden beim bevor bin bis bist
da dabei dadurch dafür dagegen daher dahin damit danach daneben dann daran darauf daraus darf darin darum darunter
darüber das dass dasselbe davon davor dazu dein deine deinem deinen deiner deines dem den denen denn dennoch der deren
derselbe des deshalb dessen dich die dies diese diesem diesen dieser dieses dir doch dort du durch dürfen
ebenso ein eine einem einen einer eines einige einigem einigen einiger einiges einmal er es etwas euch euer eure eurem
euren eurer eures
falls für
gegen gewesen
hab habe haben hat hatte hatten hattest hattet hier hin hinter hätte hätten
ich ihm ihn ihnen ihr ihre ihrem ihren ihrer ihres im in indem ins ist
ja je jede jedem jeden jeder jedes jedoch jene jenem jenen jener jenes jetzt
kann kannst kein keine keinem keinen keiner keines konnte konnten können könnte könnten
man manche manchem manchen mancher manches mehr mein meine meinem meinen meiner meines mich mir mit muss musste mussten
müssen
nach nachdem neben nein nicht nichts noch nun nur
ob obwohl oder ohne
schon sehr sei sein seine seinem seinen seiner seines seit sich sie sind so sobald solche solchem solchen solcher
solches soll sollen sollte sollten sondern sonst soweit sowie sowohl
trotz
um und uns unser unsere unserem unseren unserer unseres unter
vom von vor
wann war waren warst warum was weder weg weil welche welchem welchen welcher welches wem wen wenn wer werde werden
wessen wie wieder will wir wird wirst wo wobei wodurch wohin wollen wollte wollten womit worden wurde wurden während
würde würden
zu zum zur zwar zwischen
über
"""

_FRENCH = """
a ai aient ainsi ait alors as au auquel aura auraient aurait auront aussi autre autres aux auxquels avaient avais avait
avant avec avez aviez avions avoir avons ayant
c car ce ceci cela celle celles celui ces cet cette ceux chaque chez comme comment
d dans de depuis des desquels dont donc du duquel dès
elle elles en encore entre es est et eu eux eurent eut
furent fus fut
ici il ils
j je jusqu jusque
l la laquelle le lequel les lesquelles lesquels leur leurs lors lorsque lui là
m ma mais me mes mien mienne miens moi moins mon même mêmes
n ne ni nos notre nous nôtre
on ont ou où
par parce pas pendant peu peut peuvent plus pour pourquoi puis puisque
qu quand que quel quelle quelles quelque quelques quels qui quoi
s sa sans se sera seraient serait seront ses si sien sienne siens soi soient sois soit sommes son sont sous suis sur
t ta tandis te tel telle telles tels tes toi ton tous tout toute toutes tu très
un une
vers voici voilà vos votre vous vôtre
y
à étaient étais était étant étiez étions été êtes être
"""

_SPANISH = """
a al algo alguien algún alguna algunas alguno algunos ante antes aquel aquella aquellas aquello aquellos aquí así aun
aunque aún
bajo bien
cada casi como con contra cual cuales cualquier cuando cuanto cuál cuándo cómo
de del desde donde dos durante dónde
e el ella ellas ello ellos en entonces entre era erais eran eras es esa esas ese eso esos esta estaba estaban estado
estamos estar estas este esto estos estoy está están
fue fueron fui fuimos
ha haber habido había habían han has hasta hay he hemos hubo
incluso
la las le les lo los luego
me menos mi mis mientras mucho muchos muy más mía mías mío míos mí
nada ni ningún ninguna ninguno no nos nosotras nosotros nuestra nuestras nuestro nuestros
o os otra otras otro otros
para pero poco por porque pues
que quien quienes quién qué
se sea sean según ser será serán si sido siempre sin sino sobre sois somos son soy su sus suya suyas suyo suyos sí
también tampoco tan tanto te tenemos tener tengo ti tiene tienen toda todas todavía todo todos tras tu tus tuya tuyas
tuyo tuyos tú
u un una unas uno unos usted ustedes
vosotras vosotros vuestra vuestras vuestro vuestros
y ya yo
él éramos
"""

_ITALIAN = """
a abbia abbiamo abbiano ad agli ai al alcuna alcune alcuni alla alle allo allora altra altre altri altro anche ancora
avere aveva avevano avuto
c che chi ci ciò coi col come con contro così cui
d da dagli dai dal dalla dalle dallo degli dei del della delle dello dentro di dopo dove dunque durante
e ecco ed era erano essa esse essere essi esso
fino fra fu furono
già gli
ha hai hanno ho
i il in infatti invece io
l la le lei li lo loro lui là lì
ma me mentre mi mia mie miei mio
ne né negli nei nel nella nelle nello nessun nessuna nessuno niente noi non nostra nostre nostri nostro
o ogni ognuno oppure
per perché perciò però più poi prima proprio può
qua quale quali quando quanto quasi quel quella quelle quelli quello questa queste questi questo qui quindi
sarà saranno se sei senza si sia siamo siano siete solo sono sopra sotto stata state stati stato su sua sue sugli sui
sul sulla sulle sullo suo suoi sé
tra tu tua tue tuo tuoi tutta tutte tutti tutto
un una uno
va verso vi voi vostra vostre vostri vostro
è
"""

LISTS = {
    "english": frozenset(_ENGLISH.split()),
    "german": frozenset(_GERMAN.split()),
    "french": frozenset(_FRENCH.split()),
    "spanish": frozenset(_SPANISH.split()),
    "italian": frozenset(_ITALIAN.split()),
    "none": frozenset[str](),
}
